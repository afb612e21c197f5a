"""The TensorRT backend: a Program as an INetworkDefinition, and the engine that runs it."""
