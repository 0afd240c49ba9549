"""PTX: a lossless model of its text, the passes that edit it, and its assembly to machine code."""
