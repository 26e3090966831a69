// That the fixtures are there, all of them, and that each is run.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "fixture.hpp"

namespace {

using namespace kdt_test;

TEST(Fixtures, AllCasesOfTheTableAreThereAndRun) {
  const std::filesystem::path folder = fixtures_folder();
  std::ifstream index(folder / "index.txt");
  ASSERT_TRUE(index) << "no " << folder / "index.txt" << ": run `kdtree fixtures gen`";
  std::set<std::string> operations;
  for (std::string name; std::getline(index, name);) {
    EXPECT_TRUE(std::filesystem::is_regular_file(folder / (name + ".kdtr")))
        << "no fixture of " << name << " in " << folder << ": run `kdtree fixtures gen`";
    operations.insert(name.substr(0, name.find('/')));
  }
  EXPECT_EQ(operations, operations_run()) << "of " << folder / "index.txt" << "; run `kdtree fixtures gen`";
}

}  // namespace
