"""One file a change of the running training: match, apply, undo, and the effect to expect. `graphs/` has CUDA graphs."""
