"""How a run is configured: Hydra groups (YAML) and the typed schema. Never imports torch."""
