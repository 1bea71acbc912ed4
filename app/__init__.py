"""What a user deploys and runs: settings, routes, a client, the command line, jobs, scenarios, layouts.

Code here decides what runs. How it runs is in `deployments`, how the model learns is in `trainers`;
neither may import from here. No weights are moved here, and no fleet state is kept here.

Read first: `app.main`, the composition root. Its `build` turns a configuration into the Serve application,
and it is the only place where deployments are bound to each other.
"""
