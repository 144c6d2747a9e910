"""How fast are rollouts? Methods, settings and costs on one CPU machine."""
