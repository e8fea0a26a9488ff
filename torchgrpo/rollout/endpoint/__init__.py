"""HTTP endpoint that serves the policy to agents."""
