"""A network interpreter: what an INetworkDefinition says, computed in numpy on any machine.

It reads the network alone, layer by layer, and gives every layer the meaning that NVIDIA's documentation states. So it sees a
lowering's faults: wiring, layouts, packing, page arithmetic, masks, corrections. What the documentation leaves open it refuses.
It says nothing of the plan that the builder makes, and nothing of a GPU's own rounding.
"""

from .network import Interpreter, InterpreterError

__all__ = ["Interpreter", "InterpreterError"]
