from finlm.api import Run as Run
from finlm.api import load_recipe as load_recipe
from finlm.api import make_plan as make_plan
from finlm.api import open_run as open_run
