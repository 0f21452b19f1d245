# Where GoogleTest comes from. PATHWAYS_GOOGLETEST lists the roads, and the first one that leads there is taken:
#
#   system    what is installed
#   package   libgtest-dev of Debian and its kin, unpacked into the environment (scripts/bootstrap); nobody needs root
#   release   the release, which CMake fetches and builds
#   FOLDER    sources in that folder
#
# Defines the targets GTest::gtest and GTest::gtest_main, and says which road it took (the Makefile shows that line).
set(PATHWAYS_GOOGLETEST "" CACHE STRING "Roads to GoogleTest, in order; empty: system;package;release")
set(PATHWAYS_GOOGLETEST_URL "https://github.com/google/googletest/releases/download/v1.17.0/googletest-1.17.0.tar.gz"
    CACHE STRING "The release of GoogleTest, or a copy of that file nearer by")
set(googletest_hash 65fab701d9829d38cb77c14acdc431d2108bfdbf8979e40eb8ae567edf10b27c)

# Each road sets `found`, or `why_not`. What CMake found in an earlier configuration counts no more.
macro(take_system)
  unset(GTest_DIR CACHE)
  find_package(GTest QUIET)
  if(TARGET GTest::gtest)
    set(found "${GTest_VERSION}, which is installed")
  else()
    set(why_not "is not installed")
  endif()
endmacro()

macro(take_package)
  set(environment "$ENV{VIRTUAL_ENV}")
  if(NOT environment)
    set(environment "${CMAKE_BINARY_DIR}")
  endif()
  execute_process(COMMAND "${CMAKE_CURRENT_LIST_DIR}/../../scripts/bootstrap" googletest "${environment}"
                  RESULT_VARIABLE exit ERROR_VARIABLE why_not OUTPUT_QUIET ERROR_STRIP_TRAILING_WHITESPACE)
  if(exit EQUAL 0)
    unset(GTest_DIR CACHE)
    find_package(GTest CONFIG QUIET PATHS "${environment}/googletest/usr" NO_DEFAULT_PATH)
    set(why_not "libgtest-dev in ${environment}/googletest has no library that CMake can use")
  endif()
  if(TARGET GTest::gtest)
    set(found "${GTest_VERSION}, the package libgtest-dev, unpacked into ${environment}/googletest")
  endif()
endmacro()

macro(take_release)
  # Fetched here and not by FetchContent, which ends with words of its own where there is no network.
  set(archive "${CMAKE_BINARY_DIR}/googletest.tar.gz")
  set(status 0 "")
  if(NOT EXISTS "${archive}")
    file(DOWNLOAD "${PATHWAYS_GOOGLETEST_URL}" "${archive}" INACTIVITY_TIMEOUT 20 TIMEOUT 300 STATUS status)
  endif()
  file(SHA256 "${archive}" hash)
  list(GET status 0 code)
  if(code EQUAL 0 AND hash STREQUAL googletest_hash)
    take_sources("${archive}" "" "its release, built here")
  else()
    list(GET status 1 words)
    if(code EQUAL 0)
      set(words "another file than the release (SHA256 ${hash})")
    endif()
    set(why_not "${PATHWAYS_GOOGLETEST_URL}: ${words}")
    file(REMOVE "${archive}")
  endif()
endmacro()

# An archive of sources, or a folder.
macro(take_sources archive folder what)
  include(FetchContent)
  set(BUILD_GMOCK OFF CACHE BOOL "")
  set(INSTALL_GTEST OFF CACHE BOOL "")
  set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST "${folder}" CACHE PATH "" FORCE)
  FetchContent_Declare(googletest URL "${archive}" URL_HASH SHA256=${googletest_hash})
  FetchContent_MakeAvailable(googletest)
  set(found "${what}")
endmacro()

set(roads ${PATHWAYS_GOOGLETEST})
if(NOT roads)
  set(roads system package release)
endif()
set(tried "")
set(found "")
foreach(road IN LISTS roads)
  set(why_not "")
  if(road STREQUAL "system")
    take_system()
  elseif(road STREQUAL "package")
    take_package()
  elseif(road STREQUAL "release")
    take_release()
  elseif(IS_DIRECTORY "${road}")
    take_sources("" "${road}" "the sources in ${road}")
  else()
    message(FATAL_ERROR "PATHWAYS_GOOGLETEST: expected a list of system, package, release and folders, got ${roads}")
  endif()
  if(found)
    message(STATUS "GoogleTest: ${found}")
    break()
  endif()
  string(APPEND tried "\n  ${road}: ${why_not}")
endforeach()
if(NOT found)
  message(FATAL_ERROR "The native tests need GoogleTest, which is not to be had here:${tried}\n"
          "Install it: libgtest-dev (Debian, Ubuntu), gtest-devel (Fedora, openSUSE), gtest (Arch, Alpine, conda-forge). "
          "Or unpack its sources and give their folder: PATHWAYS_GOOGLETEST=FOLDER make test")
endif()
