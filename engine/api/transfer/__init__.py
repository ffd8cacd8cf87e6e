"""Tenants out of a store and into one: export, import, re-embedding."""
