"""Rewards that a language model computes: a judge on a server, and a sequence classifier."""
