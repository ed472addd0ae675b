"""Run experiments: from the fields of a TOML file to a folder of results.

Read the modules in this order to follow `fedcover run experiment.toml`:

1. `toml_fields`, `presets` and `experiment`: read and validate the fields.
2. `api.run`: the whole run, from the experiment to the result.
3. `setup.prepare_workload`, with `components`, `checks` and `model_trial`: build data,
   model and recipe.
4. `workload` and `machine`: choose device, engine, threads and processes.
5. `setup.build_setup`: add the policy, the rule and the engine.
6. `new_run`, `run_folder` and `session`: write the files; `checkpoints` writes the states.
7. `launch` and `worker`: share the rounds with other processes, if there are any.
8. `fedcover.server.round.run_round`: one round.
9. The engine (`fedcover.training.engines`), which agrees with
   `fedcover.training.local_sgd.train_client`: one client's local steps.

`sweep`, `sweep_workers`, `lockstep` and `joint_training` run many experiments at once.
"""
