"""PTX: a lossless model of its text, the passes that edit it, and its way through the assembler."""
