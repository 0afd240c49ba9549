"""`paellapy bench`: a load generator for v2 endpoints and for engines in this process."""
