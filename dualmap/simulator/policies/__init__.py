"""Routing policies of the simulator, one file each with its rule at the top; `registry` names them."""
