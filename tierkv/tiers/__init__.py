"""Tiers: places that store frames."""
