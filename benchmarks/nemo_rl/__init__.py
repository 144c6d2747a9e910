"""What does speculation cost and bring in a NeMo-RL job?"""
