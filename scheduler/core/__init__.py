"""The compiled dispatcher: its tables, and all code that decides which work goes onto the GPU next."""
