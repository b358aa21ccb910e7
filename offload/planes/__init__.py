"""Planes: arrays over a coordinate space whose runs have homes in tiers, and copies to and from them."""
