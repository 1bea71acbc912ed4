"""TRL's generalised Jensen-Shannon divergence of logits that are given, and its gradient, for each beta."""

import json
import sys

import torch
from trl.experimental.gkd import GKDTrainer

OPTIONS = json.loads(sys.argv[1])
STUDENT, TEACHER = (torch.tensor(OPTIONS[name], dtype=torch.float64) for name in ("student", "teacher"))
LABELS = torch.tensor(OPTIONS["labels"])


def loss_and_gradient(beta):
    student = STUDENT.clone().requires_grad_()
    loss = GKDTrainer.generalized_jsd_loss(student, TEACHER, labels=LABELS, beta=beta)
    loss.backward()
    return {"loss": loss.item(), "gradient": student.grad.tolist()}


print(json.dumps([loss_and_gradient(beta) for beta in OPTIONS["betas"]]))
