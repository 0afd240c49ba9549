"""The compiled dispatcher: its tables, and all that decides what goes onto the GPU next."""
