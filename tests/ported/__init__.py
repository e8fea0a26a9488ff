"""Rewards and configs ported from projects of verl's users."""
