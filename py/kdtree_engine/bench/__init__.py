"""What `kdtree bench` is made of: `check` compares results, `model` counts bytes and FLOP, `peers` are what users have
without this library, `measure` times."""
