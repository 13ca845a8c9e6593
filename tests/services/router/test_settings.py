def test_the_defaults_are_the_cores_own() -> None:
    """What the simulator measures is what routes: no default is said twice."""
    assert RouterSettings().choose_options == ChooseOptions()
