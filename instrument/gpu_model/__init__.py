"""The model of a GPU: its parts as data, and a discrete-event model of its SMs that gives every block its time."""
