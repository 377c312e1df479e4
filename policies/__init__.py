"""One TOML file per policy: presets and recipes. Installed as healcore.policies, read by load()."""
