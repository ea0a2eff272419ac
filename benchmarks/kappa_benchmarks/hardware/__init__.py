"""The ladder of `kappa doctor --gpu`: what only a GPU can show, rung by rung."""
