"""The plugin that these tests use is this checkout's, whether or not an installation has registered it with pytest."""

from importlib.metadata import entry_points

INSTALLED = any(entry.name == "advisor" for entry in entry_points(group="pytest11"))
pytest_plugins = ["pytester", *([] if INSTALLED else ["advisor.testing.plugin"])]
