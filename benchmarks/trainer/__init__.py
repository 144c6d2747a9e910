"""What do a refit and a restart take in the embedded trainer?"""
