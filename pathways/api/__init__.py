"""What users import. `pathways/__init__.py` re-exports it; nothing below this room imports it."""
