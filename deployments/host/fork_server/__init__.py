"""Forks of one process per host that has imported torch, transformers and vLLM.

An engine start is nine tenths imports. `client.py` replaces the interpreter of Ray's workers
(`py_executable`) and of their multiprocessing children (`set_executable`): it asks the server (`server.py`)
for a fork, which runs the command. The server has no connection to Ray, no CUDA context and one thread.
Without a server the client becomes an ordinary interpreter.

Read first: `deployments/host/fork_server/client.py`.
"""
