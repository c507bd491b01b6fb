"""The adaptive node budget in the engine, and the measurements that it starts from."""
