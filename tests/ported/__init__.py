"""Projects of verl's users, ported: their rows, a reward with their parameters, and a YAML file each."""
