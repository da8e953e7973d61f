"""For coding agents: advisor's commands as calls with short answers (calls.py), and as an MCP server (server.py)."""
