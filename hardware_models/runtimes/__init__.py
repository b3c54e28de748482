"""Runtime presets: one YAML file per framework, named like the runtime."""
