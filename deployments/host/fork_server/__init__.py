"""Forks of one process per host that has imported torch, transformers and vLLM.

Imports are nine tenths of an engine's start. `client.py` replaces the interpreter of Ray's workers
(`py_executable`) and their multiprocessing children (`set_executable`): it requests a fork from the server
(`server.py`), which runs the command. The server has no connection to Ray, no CUDA context and one thread.
Without a server the client becomes an ordinary interpreter.

Read first: `deployments/host/fork_server/client.py`.
"""
