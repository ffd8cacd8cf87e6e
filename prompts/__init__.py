"""The prompts: Jinja2 templates, the functions that fill them, and the schemas of the replies."""
