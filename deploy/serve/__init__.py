"""The Serve YAML files, as data of the installed package."""
