"""The policies that come with paellapy, one module each: `rank` is the policy."""
