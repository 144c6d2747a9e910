"""How well does the simulator predict, and what does it predict for large clusters?"""
