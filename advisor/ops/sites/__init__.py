"""Call sites of a captured graph that replay the bundled operations from C++: the thin path past Python (docs/decisions/0054).

`calls.cpp` replays and is autograd's node, `native` compiles it, `recording` watches Python do a call once, `install` puts sites into a graph.
"""
