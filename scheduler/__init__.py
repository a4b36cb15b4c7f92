"""When each request verifies: acceptance estimates, cost model and policies. No SGLang, no torch, no GPU.

Per request: ``RequestHistory.start(config, prior)``, then ``view(...)`` at planning and ``record(...)`` at commit.
Per server: one ``AcceptancePrior``, one ``CostModel`` and one policy from ``make_policy(config, cost)``.
"""
