"""Tiered arrays: arrays over an address space whose runs have homes in tiers, and copies to and from them."""
