"""Real faults under a steady load, and a checker that reads what was seen from outside.

    launching   a fleet as users start it, and its processes
    outside     the recorder, a process of its own: load, events and status, a line each
    publisher   an outside trainer, a process of its own, that can be held in the middle of a round
    recording   the lines as objects
    checker     what must hold; `test_checker` shows on forged recordings that each rule can fail
    faults      the cases as data
    striking    how a phase of a round is hit on purpose

The model (`marked_weights`) answers one token for ever, which its weights determine: a wrong label, mixed
weights and a stale cache are seen in the answer.
"""
