"""A Python whose imports are done: one process per host has imported torch, transformers and vLLM, and forks.

An engine start is nine tenths imports. `client.py` takes the place of the interpreter, for Ray's workers
(`py_executable`) and for what multiprocessing spawns in them (`set_executable`). It asks the server
(`server.py`) to fork, and the fork runs the command. The server holds no connection to Ray, no CUDA context
and one thread. Without a server the client becomes an ordinary interpreter.

Read first: `deployments/host/fork_server/client.py`.
"""
