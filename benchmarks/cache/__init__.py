"""How fast is the rollout cache, beside the raw speed of disk and memory?"""
