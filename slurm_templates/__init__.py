"""The text that Slurm sees, one readable Jinja template per kind of job; rendered by launcher/render.py."""
