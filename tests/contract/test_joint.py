from tests.contract.policy_contract import SIZE, ServicePolicyContract
from tierkv.cost import Rates
from tierkv.policies.joint import Joint

RATES = [Rates(2e-5, 8e9, 8e9), Rates(1e-4, 1e9, 1e9)]


class TestJoint(ServicePolicyContract):
    def make_policy(self, tiers: int) -> Joint:
        return Joint(RATES, [1 << 20] * tiers, [SIZE] * tiers)
