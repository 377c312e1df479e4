"""The presets, one TOML file each. Installed as healcore.policies, read by healcore.policy.load."""
