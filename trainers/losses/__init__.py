"""Losses by name, one file each, and what they have in common.

A loss is a function of the learned tokens of a micro-batch (`trainers.losses.interface`), flat and without
padding, and returns a number for each of them. The learner weights and sums these numbers, corrects them for
the policy that sampled the tokens, and adds the KL penalty (`trainers.losses.policy_loss`).

Not here: settings (`trainers.loss_settings`), advantages (`trainers.advantages`), metrics
(`trainers.step_metrics`).

Read first: `trainers.losses.interface`, then `trainers.losses.clipped`.
"""
