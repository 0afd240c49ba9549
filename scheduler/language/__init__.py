"""Language models: a decoder described by its configuration, its kernels, its pages of keys and values, its tokens."""
