"""What a user deploys and runs: settings, HTTP routes, a client, the command line, RL jobs, layouts.

It decides what runs; `deployments` is how it runs, `trainers` how the model learns. Neither imports from
here.

Read first: `app.main`, which turns a configuration into the Serve application.
"""
