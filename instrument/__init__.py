"""The compiler passes, records and devices beneath paellapy."""
