"""A search: order, rounds, fresh runs, proof and plan. `live/` is one trial in the loop, `numerics/` the gate."""
