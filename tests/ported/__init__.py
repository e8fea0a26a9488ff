"""Ported projects of verl's users: a reward and a YAML file each."""
